{{/* What all workers have in common. */}}
{{- define "marq.labels" -}}
app.kubernetes.io/name: marq
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Annotations that change with what a pod reads only at its start. */}}
{{- define "marq.annotations" -}}
marq/queues: {{ .Values.queues | sha256sum | quote }}
{{- end }}

{{- define "marq.pod" -}}
automountServiceAccountToken: false
# Kubernetes would set MARQ_WEB_PORT to an address of a Service that is called marq-web.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "marq.container" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
# For images of services, too, which have another command or none.
command: [marq, worker]
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
envFrom:
  - secretRef:
      name: {{ .Values.secret | quote }}
# The first answer comes when the broker was reached, topics were looked at, and handlers were imported.
startupProbe:
  httpGet: { path: /healthz, port: web }
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: { path: /healthz, port: web }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{- end }}

{{/* Of trackers and handlers. */}}
{{- define "marq.web" -}}
ports:
  - name: web
    containerPort: 6066
readinessProbe:
  httpGet: { path: /readyz, port: web }
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}

{{- define "marq.env" -}}
- name: MARQ_BOOTSTRAP_SERVERS
  value: {{ required "bootstrapServers: say where the brokers are, host:port" .Values.bootstrapServers | quote }}
- name: MARQ_PREFIX
  value: {{ .Values.prefix | quote }}
- name: MARQ_REPLICATION_FACTOR
  value: {{ .Values.replicationFactor | quote }}
- name: MARQ_PARTITIONS
  value: {{ .Values.partitions | quote }}
- name: MARQ_QUEUES_FILE
  value: /etc/marq/queues.toml
- name: MARQ_WEB_BIND
  value: 0.0.0.0
{{- if .Values.tlsSecret }}
- name: MARQ_SSL_CAFILE
  value: /etc/marq-tls/ca.crt
{{- if .Values.clientCertificate }}
- name: MARQ_SSL_CERTFILE
  value: /etc/marq-tls/tls.crt
- name: MARQ_SSL_KEYFILE
  value: /etc/marq-tls/tls.key
{{- end }}
{{- end }}
{{- range $name, $value := .Values.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- define "marq.mounts" -}}
- name: queues
  mountPath: /etc/marq
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- if .Values.tlsSecret }}
- name: tls
  mountPath: /etc/marq-tls
  readOnly: true
{{- end }}
{{- end }}

{{- define "marq.volumes" -}}
- name: queues
  configMap:
    name: {{ .Release.Name }}-queues
- name: tmp
  emptyDir: {}
{{- if .Values.tlsSecret }}
- name: tls
  secret:
    secretName: {{ .Values.tlsSecret | quote }}
{{- end }}
{{- end }}
